"""`python -m clients`: the client's commands, and `warm`, which runs the published stages and so needs a checkout."""

from clients.warming import warm_cache
from triton_recommender.cli import app, report_errors

app.command("warm")(report_errors()(warm_cache))

if __name__ == "__main__":
    app(prog_name="python -m clients")
