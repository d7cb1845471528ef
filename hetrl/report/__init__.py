"""What people read: tables for the terminal, and the pages of a plan and of a run."""
