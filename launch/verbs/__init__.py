"""The verbs of the command line that are about a plan or a run."""
