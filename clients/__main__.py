from clients.cli import app

app(prog_name="python -m clients")
