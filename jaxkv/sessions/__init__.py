"""Conversations of agents: prompts that grow, fork and are cut back."""
