"""The service of `main.py serve`: images over HTTP in the form of OpenAI's images API, as they grow."""
