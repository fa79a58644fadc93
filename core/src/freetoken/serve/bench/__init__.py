"""Measures a server from outside, as its clients see it: the OpenAI chat API over HTTP and nothing else."""
