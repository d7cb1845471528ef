"""The rollout engine: a vLLM server as a child process."""
