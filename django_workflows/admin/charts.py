"""Small charts as SVG, with classes and SVG attributes alone: no script, no style of their own."""

from __future__ import annotations

from collections.abc import Sequence

from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from django_workflows.status import Bar, Figure

BAR, GAP, HEIGHT = 10, 2, 60
#: A bar that is there at all is so high at least.
LEAST = 2.0


def chart(bars: Sequence[Bar], name: str, title: str, *, time_format: str) -> SafeString:
    """Bars with a text for each, and the highest number; for the page as a whole."""
    highest = _highest(bars)
    drawn = format_html_join(
        "\n",
        '<g><title>{}</title><rect class="workflows-behind" x="{}" y="0" width="{}" height="{}"/>'
        '<path class="workflows-handled-bar" d="{}"/><path class="workflows-failed-bar" d="{}"/>'
        "</g>",
        (
            (_told(bar, time_format), i * (BAR + GAP), BAR, HEIGHT, *_paths([bar], highest, i))
            for i, bar in enumerate(bars)
        ),
    )
    return _svg(bars, name, title, drawn, "workflows-chart")


def sparkline(bars: Sequence[Bar], name: str, title: str) -> SafeString:
    """The same in little: two paths for one row of a table."""
    handled, failed = _paths(bars, _highest(bars), 0)
    drawn = format_html(
        '<path class="workflows-handled-bar" d="{}"/><path class="workflows-failed-bar" d="{}"/>',
        handled,
        failed,
    )
    return _svg(bars, name, title, drawn, "workflows-chart workflows-small")


def totals(bars: Sequence[Bar]) -> tuple[Figure, Figure]:
    """How many were handled, and failed, in all of them."""
    return sum((b.handled for b in bars), Figure()), sum((b.failed for b in bars), Figure())


def _svg(bars: Sequence[Bar], name: str, title: str, drawn: SafeString, classes: str) -> SafeString:
    width = max(len(bars) * (BAR + GAP) - GAP, 1)
    handled, failed = totals(bars)
    return format_html(
        '<svg class="{classes}" role="img" aria-labelledby="{name}-title {name}-desc" '
        'viewBox="0 0 {width} {height}" preserveAspectRatio="none">'
        '<title id="{name}-title">{title}</title><desc id="{name}-desc">{desc}</desc>'
        '{drawn}<path class="workflows-axis" d="M0 {height}h{width}"/></svg>',
        classes=classes,
        name=name,
        title=title,
        desc=_("%(handled)s handled, %(failed)s failed") % {"handled": handled, "failed": failed},
        width=width,
        height=HEIGHT,
        drawn=drawn,
    )


def _highest(bars: Sequence[Bar]) -> int:
    return max((bar.handled.value + bar.failed.value for bar in bars), default=0) or 1


def _paths(bars: Sequence[Bar], highest: int, first: int) -> tuple[str, str]:
    """The handled, and the failed ones on top of them, as rectangles."""
    handled, failed = [], []
    for i, bar in enumerate(bars, first):
        x, below = i * (BAR + GAP), _height(bar.handled.value, highest)
        above = _height(bar.failed.value, highest)
        if below:
            handled.append(f"M{x} {HEIGHT}v{-below:.1f}h{BAR}v{below:.1f}z")
        if above:
            failed.append(f"M{x} {HEIGHT - below:.1f}v{-above:.1f}h{BAR}v{above:.1f}z")
    return "".join(handled), "".join(failed)


def _height(count: int, highest: int) -> float:
    return max(count / highest * (HEIGHT - 2 * LEAST), LEAST) if count else 0.0


def _told(bar: Bar, time_format: str) -> str:
    start = timezone.localtime(bar.start).strftime(time_format)
    return _("%(start)s: %(handled)s handled, %(failed)s failed") % {
        "start": start,
        "handled": bar.handled,
        "failed": bar.failed,
    }
