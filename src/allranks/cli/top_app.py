"""The screen of `allranks top`, drawn with textual. It only reads; what it shows is made by report.top_rows.

Files are read in a thread, so that a slow file server does not stop the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from allranks.report.text import Style, count_of, one_row
from allranks.report.top_rows import (
    ORDERS,
    Tone,
    TopRow,
    TopView,
    cells_of,
    choose_columns,
    event_lines,
    head_lines,
    node_lines,
    pick_rows,
    tone_of,
)

EVERY_S = 2.0
COLORS = {Tone.PLAIN: "", Tone.COSTLY: "yellow", Tone.SUSPECT: "bold yellow", Tone.CULPRIT: "bold red"}
LOG_LINES = "200"
HELP = """\
Ranks that do the same are one row, the worst first.
{mark} marks ranks that the others wait for now, ! those that cost them 5 % or
more of their time.

  STATE      of the training thread: start, step, backward, data, save, or the
             collective in which it waits; running: no step was seen yet;
             kernel: in the kernel, on a disk or file server; else stopped,
             ended, lost, silent
  FOR        how long the first of them has been in it; with > at least, as it
             was so before the watch began
  WHERE      file and line of the training thread
  LATE       by how much they come later than the others, lately
  COST       share of the others' time that was spent waiting for them
  CPU, RSS   percent of a core, and resident memory; the most of them
  GPU        share of the time in which a kernel ran, the idlest of them; an
             NCCL kernel that waits for other ranks counts, too
  GPU MEM    memory in use, the fullest of them; both only where nvidia-smi
             tells
  OUT, IN    Mbit/s of the busiest of their nodes
  RESENT     share of TCP segments that were sent again
  LAST LINE  of the log of the first of them

  s          stacks of all ranks (allranks stack)
  l, Enter   the end of the selected rank's log (allranks logs)
  o          sort by {orders}
  /          show only rows that have a text; Esc shows all
  ?          this page; ?, q and Esc close it, and the pages of s and l
  q, Ctrl-C  quit; the job goes on
"""


class TextPage(Screen[None]):
    """A page of text that is made in a thread; the keys that open or quit something close it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape,question_mark,h", "close", "Back", key_display="q, Esc"),
    ]

    def __init__(self, title: str, make: Callable[[], str], *, shows_end: bool = False) -> None:
        """Make a page.

        Args:
            title: stands above it.
            make: returns the text.
            shows_end: whether its end is shown first.
        """
        super().__init__()
        self._title, self._make, self._shows_end = title, make, shows_end

    def compose(self) -> ComposeResult:
        """Draw the page before its text is there."""
        yield Static(Text(self._title, style="bold"), id="title")
        with VerticalScroll():
            yield Static(f"{self._title} ...", id="text", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Make the text."""
        self.run_worker(self._fill, thread=True)

    def _fill(self) -> None:
        lines = self._make().splitlines() or ["(nothing)"]
        self.app.call_from_thread(self._take, Text("\n".join(map(one_row, lines))))

    def _take(self, text: Text) -> None:
        if self.is_mounted:
            self.query_one("#text", Static).update(text)
            if self._shows_end:
                self.query_one(VerticalScroll).anchor()

    def action_close(self) -> None:
        """Go back to the table."""
        self.dismiss()


class TopScreen(Screen[None]):
    """The tables of one job."""

    CSS = """
    #head, #note, #nodes, #events { height: auto; text-wrap: nowrap; text-overflow: ellipsis; }
    #rows { height: 1fr; }
    #rows > .datatable--header { background: ansi_default; text-style: dim; }
    #rows > .datatable--cursor { background: ansi_default; color: ansi_default; text-style: reverse; }
    #more { height: auto; max-height: 40%; }
    #search { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "stack", "Stack"),
        Binding("l", "log", "Log"),
        Binding("o", "order", "Sort"),
        Binding("slash", "search", "Search"),
        Binding("escape", "clear", "All", show=False),
        Binding("question_mark,h", "help", "Help", key_display="?"),
        Binding("q", "app.quit", "Quit"),
        Binding("j", "move(1)", show=False),
        Binding("k", "move(-1)", show=False),
    ]

    def __init__(
        self,
        job: str,
        look: Callable[[], TopView | None],
        run_verb: Callable[[Sequence[str]], str],
        *,
        missing: str,
        style: Style,
        every_s: float = EVERY_S,
        is_done: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make the screen.

        Args:
            job: its id.
            look: reads its state; None: it has none yet.
            run_verb: returns what a verb of allranks prints about this job.
            missing: what to show while it has no state.
            every_s: how often to look.
            is_done: whether to quit.
        """
        super().__init__()
        self._job, self._look, self._run_verb, self._missing, self._style = job, look, run_verb, missing, style
        self._every_s, self._is_done = every_s, is_done
        self._view: TopView | None = None
        self._shown: list[TopRow] = []
        self._order, self._wanted = next(iter(ORDERS)), ""

    def compose(self) -> ComposeResult:
        """Lay the screen out."""
        yield Static(id="head")
        yield Static(id="note")
        yield DataTable[Text](id="rows", cursor_type="row", cell_padding=0, cursor_foreground_priority="renderable")
        with VerticalScroll(id="more", can_focus=False):
            yield Static(id="nodes")
            yield Static(id="events")
        yield Input(placeholder="search", id="search", compact=True)
        yield Footer()

    def on_mount(self) -> None:
        """Read the state now and every EVERY_S."""
        self.query_one("#rows").focus()
        self._read()
        self.set_interval(self._every_s, self._read)

    def on_resize(self) -> None:
        """Show the columns that the new width has room for."""
        self._draw()

    def _read(self) -> None:
        self.run_worker(self._read_in_thread, thread=True, exclusive=True, group="look")

    def _read_in_thread(self) -> None:
        view = self._look()
        self.app.call_from_thread(self._take, view)

    def _take(self, view: TopView | None) -> None:
        self._view = view
        self._draw()
        if self._is_done():
            self.app.exit()

    def _draw(self) -> None:
        view, style = self._view, replace(self._style, width=self.size.width)
        head = [self._missing] if view is None else head_lines(view, style)
        self._write("#head", [Text(line) for line in head])
        if view is None:
            return
        rows = pick_rows(view.rows, order=self._order, wanted=self._wanted)
        search = f", with {self._wanted!r}" if self._wanted else ""
        order = f"{len(rows)} of {count_of(len(view.rows), 'row')}, sorted by {self._order}{search}"
        self._write("#note", [Text(order, style="dim")])
        self._draw_rows(rows, view.unknown)
        nodes, events = node_lines(view.status.nodes, style), event_lines(view.status.events)
        for name, lines in (("nodes", nodes), ("events", events)):
            self._write(f"#{name}", [Text(name.upper(), style="dim"), *map(Text, lines)] if lines else [])

    def _write(self, name: str, lines: Sequence[Text]) -> None:
        self.query_one(name, Static).update(Text("\n").join(lines))

    def _draw_rows(self, rows: list[TopRow], unknown: Sequence[str]) -> None:
        table = self._table
        selected, at, scrolled = self._selected, table.cursor_row, table.scroll_y
        columns = choose_columns(self.size.width - table.scrollbar_size_vertical - 1, unknown)
        table.clear(columns=True)
        for column in columns:
            title = f"{column.title:>{column.width}}" if column.is_number else column.title
            table.add_column(Text(title), width=column.width + 1)
        for row in rows:
            cells = cells_of(row, columns, self._style)
            table.add_row(*(Text(f"{text} ", style=COLORS[tone_of(row)]) for text in cells))
        self._shown = rows
        same = [number for number, row in enumerate(rows) if selected and row.of.ranks[:1] == selected.of.ranks[:1]]
        table.move_cursor(row=same[0] if same else at, scroll=False)
        table.scroll_y = scrolled

    @property
    def _table(self) -> DataTable[Text]:
        table: DataTable[Text] = self.query_one("#rows", DataTable)
        return table

    @property
    def _selected(self) -> TopRow | None:
        row = self._table.cursor_row
        return self._shown[row] if 0 <= row < len(self._shown) else None

    def action_stack(self) -> None:
        """Show the stacks of all ranks."""
        self._show_verb(["stack"])

    def action_log(self) -> None:
        """Show the end of the log of the selected row's first rank."""
        if (selected := self._selected) is not None and selected.of.ranks:
            self._show_verb(["logs", "--rank", str(selected.of.ranks[0]), "--tail", LOG_LINES])

    def _show_verb(self, words: list[str]) -> None:
        title, is_log = f"allranks {' '.join(words)} {self._job}", words[0] == "logs"
        self.app.push_screen(TextPage(title, lambda: self._run_verb(words), shows_end=is_log))

    def on_data_table_row_selected(self) -> None:
        """Enter: show the log."""
        self.action_log()

    def action_move(self, by: int) -> None:
        """Select the next row, or the one before."""
        self._table.move_cursor(row=self._table.cursor_row + by)

    def action_order(self) -> None:
        """Sort by the next of ORDERS."""
        names = list(ORDERS)
        self._order = names[(names.index(self._order) + 1) % len(names)]
        self._draw()

    def action_search(self) -> None:
        """Ask for a text."""
        search = self.query_one("#search", Input)
        search.display = True
        search.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the rows that have what is typed."""
        self._wanted = event.value
        self._draw()

    def on_input_submitted(self) -> None:
        """Keep the rows, and give the keys back to the table."""
        self.query_one("#search", Input).display = False
        self._table.focus()

    def action_clear(self) -> None:
        """Show all rows."""
        self.query_one("#search", Input).value = ""
        self.on_input_submitted()

    def action_help(self) -> None:
        """Explain columns and keys."""
        text = HELP.format(orders=", ".join(ORDERS), mark=self._style.mark("✗", "x"))
        self.app.push_screen(TextPage("allranks top", lambda: text))


class TopApp(App[None]):
    """Shows one screen, and the pages that it opens."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "quit", "Quit", show=False, priority=True)]

    def __init__(self, first: Screen[None]) -> None:
        """Make the program around its first screen."""
        super().__init__(ansi_color=True)  # said here, too: so NO_COLOR removes colors, instead of making them gray
        self._first = first
        self.theme = "ansi-dark"  # the terminal's own colors

    def on_mount(self) -> None:
        """Show the screen."""
        self.push_screen(self._first)
