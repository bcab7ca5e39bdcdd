"""How does an operator look after a cluster? The verbs below `ripresa admin`."""

from __future__ import annotations

import click


@click.group()
def admin() -> None:
    """Look after a running cluster, and its API keys."""


@admin.command("new-key")
def new_key() -> None:
    """Make an API key: the key itself for its user, its digest for the key file.

    The key is shown here and nowhere again; the server needs the digest alone. In the file:

    \b
      tenants:
        acme:
          keys: ["sha256:..."]
          max_running: 8            optional: answers under way at once
          tokens_per_minute: 200000 optional: computed and generated tokens
    """
    from ripresa.cluster.gateway import api_keys

    key = api_keys.new_key()
    click.echo(f"key     {key}")
    click.echo(f"digest  {api_keys.key_digest(key)}")
