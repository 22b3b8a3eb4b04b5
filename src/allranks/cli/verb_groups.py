"""Groups of verbs: without a verb they print their help, and for an unknown verb they suggest the nearest."""

from __future__ import annotations

import click

_OTHER_NAMES = {"stop": "cancel", "kill": "cancel", "runs": "list", "jobs": "list", "ps": "list"}
"""What other tools call a verb; in letters, `stop` is nearest to `top`."""


class VerbGroup(click.Group):
    """A group whose errors suggest the nearest verb, as the errors of options do.

    click has suggestions of its own since 8.4, but not for verbs that are imported only when they are called.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read no words at all as `--help`, and `help lab up` as `lab up --help`."""
        if not args or args[0] == "help":
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the verb that is meant.

        Raises:
            click.UsageError: there is no such verb; it names the nearest one.
        """
        name = args[0]
        if self.get_command(ctx, name) is None and name[:1] != "-" and not ctx.resilient_parsing:
            import difflib  # only here: it costs time

            verbs = self.list_commands(ctx)
            close = [v for v in [_OTHER_NAMES.get(name)] if v in verbs] or difflib.get_close_matches(name, verbs, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise click.UsageError(f"no such command {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)
