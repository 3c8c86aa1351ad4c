"""The command line: ``tiered-kv``."""

from __future__ import annotations

import typer

from tiered_kv import store_cli

app = typer.Typer(
    help="Tools for the KV cache that tiered-kv keeps.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(store_cli.app, name="store")


@app.callback()
def root() -> None:
    """Tools for the KV cache that tiered-kv keeps."""


def main() -> None:
    """Run the command that the arguments name."""
    app()


if __name__ == "__main__":
    main()
