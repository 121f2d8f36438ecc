"""Forms on the admin's pages, as a browser would send them."""

from collections.abc import Iterable
from html.parser import HTMLParser
from typing import Any
from uuid import uuid4

from django.http import HttpResponse
from django.test import Client


class _Forms(HTMLParser):
    """The fields of each form on a page, with the buttons' names and values."""

    def __init__(self) -> None:
        super().__init__()
        self.forms: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._textarea: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "form":
            self._open = {"action": found.get("action") or "", "fields": [], "buttons": []}
            self.forms.append(self._open)
        elif self._open is None:
            return
        elif tag == "input" and found.get("type") not in ("submit", "checkbox"):
            self._open["fields"].append((found.get("name"), found.get("value") or ""))
        elif tag == "textarea":
            self._textarea = found.get("name")
            self._open["fields"].append((self._textarea, ""))
        elif tag == "button" and found.get("name"):
            self._open["buttons"].append((found["name"], found.get("value") or ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._open = None
        elif tag == "textarea":
            self._textarea = None

    def handle_data(self, data: str) -> None:
        if self._textarea and self._open:
            name, value = self._open["fields"].pop()
            self._open["fields"].append((name, value + data))


def forms_on(response: HttpResponse) -> list[dict[str, Any]]:
    parser = _Forms()
    parser.feed(response.text)  # type: ignore[attr-defined]
    return parser.forms


def submit(client: Client, response: Any, wanted: str, **answers: str) -> Any:
    """Send the form of the page that has a field or a button of this name; follow to its end."""
    for form in forms_on(response):
        names = [name for name, _value in (*form["fields"], *form["buttons"])]
        if wanted in names:
            data: dict[str, list[str]] = {}
            for name, value in form["fields"]:
                data.setdefault(name, []).append(value)
            path = form["action"] or response.request["PATH_INFO"]
            if not form["action"] and response.request["QUERY_STRING"]:
                path += f"?{response.request['QUERY_STRING']}"
            return client.post(path, {**data, **answers}, follow=True)
    raise AssertionError(f"no form on the page has {wanted!r}")


def confirm(client: Client, response: Any, **answers: str) -> Any:
    """Confirm what a confirmation page asks, and go on until it is done."""
    response = submit(client, response, "confirmed", **answers)
    while "data-workflows-continue" in response.text:
        response = submit(client, response, "confirmed")
    return response


def press(client: Client, response: Any, action: str) -> Any:
    """Press the button of an action on the page of one row."""
    return submit(client, response, "row", action=action)


def buttons_on(response: Any) -> list[str]:
    """The actions that the page of one row offers."""
    return [
        value for form in forms_on(response) for name, value in form["buttons"] if name == "action"
    ]


def select(
    client: Client, path: str, action: str, pks: Iterable[Any], *, across: bool = False
) -> Any:
    """Choose an action for some rows of a list, or for all that match."""
    selected = [str(pk) for pk in pks] or [str(uuid4())]  # as Django's script does for all
    data = {"action": action, "_selected_action": selected, "index": "0"}
    return client.post(path, {**data, "select_across": "1" if across else "0"}, follow=True)
