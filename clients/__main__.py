"""`python -m clients`: the client's commands, from a checkout."""

from triton_recommender.cli import app

if __name__ == "__main__":
    app(prog_name="python -m clients")
