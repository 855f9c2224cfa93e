"""Conversations as text: chat templates, tool calls, tokenizers, and which tokens are trained."""
