"""`python -m triton_recommender`: the command line, where the extra `cli` is installed."""


def main() -> None:
    try:
        from triton_recommender.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(
            f"The command line needs {error.name}; expected the extra `cli`. In the checkout: pip install './clients[cli]'"
        ) from error
    app(prog_name="python -m triton_recommender")


if __name__ == "__main__":
    main()
