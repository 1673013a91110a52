"""Run the gateway, or make a bearer token: python -m gateway serve | token | openapi-doc."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
import uvloop

import gateway.quiet_grpc  # noqa: F401  before anything imports grpc
from gateway.app import OPENAPI, compose_openapi, create_app
from gateway.edge.protocol import make_http_server, open_socket
from gateway.edge.tokens import add_token, read_tokens
from gateway.edge.tracing import start_tracing
from gateway.settings import GatewaySettings, read_settings
from serving.contract.errors import run_program
from serving.contract.logs import configure_logging, print_json_line
from triton_recommender import AsyncRecommender, Timeouts, Tls
from triton_recommender import RecommenderError as ClientError
from triton_recommender.endpoints import MAX_RETRIES

app = typer.Typer(help="REST in front of a tritonserver, in the shop's own ids.", no_args_is_help=True, add_completion=False)

CONNECT_S = 1.0
RECORD_S = 5.0  # an event or a change may take longer than a recommendation, because no page waits for it


@app.command()
def serve(
    repo: Annotated[Path, typer.Option(help="model repository that the server serves")] = Path("model_repository"),
    server: Annotated[str, typer.Option(help="host:port of the server's gRPC")] = "localhost:8001",
    port: Annotated[int, typer.Option(min=1, max=65_535, help="port to listen at")] = 8080,
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings (docs/gateway.md)")] = None,
    server_authorities: Annotated[Path | None, typer.Option(help="PEM: authorities of the server's certificate")] = None,
    server_certificate: Annotated[Path | None, typer.Option(help="PEM: the gateway's own certificate, for mutual TLS")] = None,
    server_key: Annotated[Path | None, typer.Option(help="PEM: the key of that certificate")] = None,
    tag: Annotated[str, typer.Option(hidden=True, help="names the server that this gateway ends with")] = "",
) -> None:
    """Answer requests until SIGTERM or SIGINT."""
    configure_logging(logging.WARNING)
    files = {"server_authorities": server_authorities, "server_certificate": server_certificate, "server_key": server_key}
    uvloop.run(run(repo.resolve(), server, port, read_settings(config, **files)))


async def run(repo: Path, server: str, port: int, settings: GatewaySettings) -> None:
    """Serve a repository at `port` until SIGTERM or SIGINT. server: host:port of gRPC"""
    tokens = read_tokens(settings.tokens) if settings.tokens else {}
    recommender, challenger = make_clients(server, settings)
    app = create_app(repo, recommender, settings, tokens, traced=start_tracing(), challenger=challenger)
    http = make_http_server(app, settings, port)
    serving = asyncio.create_task(http.serve([open_socket(settings.host, port)]))
    while not http.started and not serving.done():
        await asyncio.sleep(0.01)
    if http.started:
        address = f"{'https' if settings.certificate else 'http'}://{settings.host}:{port}"
        print_json_line("INFO", "gateway", f"listens at {address}")
    await serving


def make_clients(server: str, settings: GatewaySettings) -> tuple[AsyncRecommender, AsyncRecommender]:
    """Return the clients for the champion and for challengers. A challenger is asked as often as there are servers."""
    servers, tls = [server, *settings.servers], _choose_tls(settings)
    timeouts = Timeouts(RECORD_S, connect=CONNECT_S, tell_server=not settings.servers)
    champion = AsyncRecommender(servers, timeouts=timeouts, hedge_after_s=settings.hedge_after_s, tls=tls, timings=True)
    retries = min(len(settings.servers), MAX_RETRIES)
    return champion, AsyncRecommender(servers, timeouts=timeouts, retries=retries, tls=tls, timings=True)


def _choose_tls(settings: GatewaySettings) -> Tls | None:
    """Return the TLS files for calls to the servers; None for plain gRPC."""
    files = (settings.server_authorities, settings.server_key, settings.server_certificate)
    return None if files == (None, None, None) else Tls(*files)


@app.command()
def token(
    name: Annotated[str, typer.Option(help="name of the caller that gets it")],
    file: Annotated[Path, typer.Option(help="file of all tokens; it keeps only their hashes")] = Path("tokens.txt"),
) -> None:
    """Make a bearer token and print it. It cannot be shown again."""
    typer.echo(add_token(file, name))


@app.command()
def openapi_doc() -> None:
    """Write docs/openapi.json anew, from the routes."""
    OPENAPI.write_text(compose_openapi())
    typer.echo(f"wrote {OPENAPI}")


def main() -> None:
    try:
        run_program(app)
    except ClientError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
