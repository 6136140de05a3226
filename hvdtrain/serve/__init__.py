"""A server of OpenAI's API for a trained language model."""
