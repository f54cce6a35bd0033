"""Keys, to use the queue from another machine (docs/remote.md)."""

from __future__ import annotations

import time

import click

from rlq.cli.app import App, note, verb
from rlq.cli.output import (
    Column,
    Row,
    clean,
    print_json,
    print_table,
    print_tsv,
    stdout_is_terminal,
)
from rlq.errors import NotFoundError, UsageError
from rlq.protocol import keys
from rlq.protocol.messages import EnrolKey, Keys, ListKeys, Ok, RevokeKey


@verb(
    "key",
    cls=click.Group,
    invoke_without_command=True,
    short_help="Keys, to use the queue from another machine.",
)
@click.option("--force", is_flag=True, help="Make a new key in place of the one you have.")
def command(app: App, force: bool) -> None:
    """Your key, by which another machine's daemon knows you; it is made if you have none.

    \b
    rlq key                         here: make your key, see its public half
    rlq key enrol NAME PUBLICKEY    there, as an administrator: let it in as NAME
    rlq key server                  there: print the key of its daemon
    rlq key trust HOST KEY          here: know that daemon by it
    rlq --host HOST list            and it works
    """
    if click.get_current_context().invoked_subcommand is not None:
        if force:
            raise UsageError("--force goes after the word that follows `key`")
        return
    import getpass

    from rlq import remote

    secret = remote.load_secret() if not force else None
    made = secret is None
    if secret is None:
        secret = remote.make_secret()
    public = keys.show_key(remote.public_of(secret))
    path = remote.key_path()
    try:
        name = getpass.getuser()
    except (OSError, KeyError):
        name = "NAME"
    enrol = f"rlq key enrol {name} {public}"
    if app.json:
        print_json({"public_key": public, "path": str(path), "made": made, "enrol": enrol})
        return
    note(f"{'made' if made else 'you have'} a secret key: {path} (for nobody but you)")
    note("your public key:")
    click.echo(public)
    note("an administrator of the lab machine lets it in with (your user name there?):")
    note(f"  {enrol}")
    if made and force:
        note("keys enrolled before are worth nothing to you now: have them revoked")


@verb("enrol", short_help="Let a key in as a user (administrators).")
@click.argument("name")
@click.argument("public_key", metavar="PUBLICKEY")
def enrol(app: App, name: str, public_key: str) -> None:
    """Whoever holds the secret half of PUBLICKEY may use the queue over the network as NAME:
    submit jobs that run as NAME, so it is worth as much as a login."""
    key = keys.show_key(keys.parse_key(public_key))
    with app.client() as client:
        done = client.request(EnrolKey(user=name, key=key))
        assert isinstance(done, Ok)
        listed = client.request(ListKeys())
        assert isinstance(listed, Keys)
    if app.json:
        print_json(done)
        return
    click.echo(clean(done.message))
    if not listed.endpoint:
        note("the daemon does not listen for other machines yet: set [remote] listen")
        note("in its configuration, then start it again")


@verb("list", short_help="The enrolled keys.")
def list_(app: App) -> None:
    """The enrolled keys: yours; for an administrator, everybody's."""
    with app.client() as client:
        found = client.request(ListKeys())
        assert isinstance(found, Keys)
    if app.json:
        print_json(found)
        return
    if not stdout_is_terminal():
        print_tsv(
            ("USER", "KEY", "ENROLLED", "BY"),
            [(k.user, k.key, round(k.enrolled_at), k.enrolled_by) for k in found.keys],
        )
        return
    if not found.keys:
        note("no key is enrolled")
        return
    columns = [Column("USER", least=6), Column("KEY"), Column("ENROLLED")]
    days = [time.strftime("%Y-%m-%d", time.localtime(k.enrolled_at)) for k in found.keys]
    print_table(
        columns, [Row([k.user, k.key, day]) for k, day in zip(found.keys, days, strict=True)]
    )


@verb("revoke", short_help="Let a key in no longer (administrators).")
@click.argument("key_or_name", metavar="PUBLICKEY|NAME")
def revoke(app: App, key_or_name: str) -> None:
    """Let a key, or all keys of user NAME, in no longer: at once, on open connections too."""
    is_key = len(key_or_name) == keys.KEY_CHARS or key_or_name.startswith(keys.SECRET_PREFIX)
    if is_key:
        request = RevokeKey(key=keys.show_key(keys.parse_key(key_or_name)))
    else:
        request = RevokeKey(user=key_or_name)
    with app.client() as client:
        done = client.request(request)
        assert isinstance(done, Ok)
    if app.json:
        print_json(done)
    else:
        click.echo(clean(done.message))


@verb("server", short_help="The key of this machine's daemon.")
def server(app: App) -> None:
    """The key by which other machines know this one's daemon."""
    with app.client() as client:
        found = client.request(ListKeys())
        assert isinstance(found, Keys)
    if not found.server_key:
        raise NotFoundError(
            "the daemon has no key: it does not listen for other machines",
            hint=f'[remote] listen = "tcp://*:{keys.PORT}" in its configuration, then start it'
            " again",
        )
    if app.json:
        print_json({"server_key": found.server_key, "endpoint": found.endpoint})
        return
    click.echo(found.server_key)
    port = found.endpoint.rpartition(":")[2]
    host = "HOST" if port == str(keys.PORT) else f"HOST:{port}"
    note("on the other machine, with the name of this one in place of HOST:")
    note(f"  rlq key trust {host} {found.server_key}")


@verb("trust", short_help="Know another machine's daemon by its key.")
@click.argument("server_host", metavar="HOST")
@click.argument("public_key", metavar="KEY")
@click.option("--force", is_flag=True, help="In place of another key that is known of it.")
def trust(app: App, server_host: str, public_key: str, force: bool) -> None:
    """Know the daemon on HOST (HOST:PORT) by KEY, which `rlq key server` prints there."""
    from rlq import remote

    fresh = remote.trust(server_host, keys.parse_key(public_key), force=force)
    name = remote.show_host(*remote.parse_host(server_host))
    if app.json:
        print_json({"host": name, "known": True, "changed": fresh})
        return
    click.echo(f"{name} is known" if fresh else f"{name} was known already")
    if fresh and remote.load_secret() is None:
        note("`rlq key` makes your own key")


for one in (enrol, list_, revoke, server, trust):
    assert isinstance(command, click.Group)
    command.add_command(one)
