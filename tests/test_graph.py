"""The process drawn: what the graph says, where an instance is, and the drawings."""

import json
import re
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_workflows import Command, HandlerContext, define_workflow, handles, send
from django_workflows.dispatch import deliver
from django_workflows.graph import (
    Graph,
    Kind,
    Mark,
    as_dot,
    as_json,
    as_mermaid,
    as_svg,
    definition_of,
    graph_of,
    reading,
    svg_for,
    workflow_named,
)
from django_workflows.graph.layout import back_edges, lay_out
from django_workflows.models import Delivery, Status
from testproject.orders.messages import TakePayment
from testproject.orders.models import BatchOrderState, CreditCheckState, FulfilmentState
from testproject.orders.placing import place_batch, place_order
from tests.delivering import deliver_due
from tests.models import TallyState
from tests.stored import stored

pytestmark = pytest.mark.django_db(transaction=True)

SVG = "{http://www.w3.org/2000/svg}"
NASTY = """a</text><script>alert("1")</script>'&\x00\x1b\ud800]]>--%> \u202eevil"""


class Begin(Command, name="tests.graph.Begin"):
    key: str


class Again(Command, name="tests.graph.Again"):
    pass


@pytest.fixture(autouse=True)
def _no_chance(settings: Any) -> None:
    settings.PAYMENT_DECLINE_RATE = settings.PAYMENT_FLAKY_RATE = 0
    settings.CREDIT_REFUSE_RATE = settings.SHIPMENT_FAIL_RATE = 0


def fulfilment(**how: Any) -> Graph:
    return graph_of(workflow_named("orders.FulfilmentState"), **how)


def pairs(graph: Graph) -> set[tuple[str, str, str]]:
    """Source, message and target of each edge that was seen, by name."""
    titles = {key: node.title for key, node in graph.nodes.items()}
    return {
        (titles[edge.source], edge.message.removeprefix("orders."), titles[edge.target])
        for edge in graph.edges.values()
        if not edge.is_declared
    }


def node(graph: Graph, title: str, kind: Kind = Kind.STEP) -> Any:
    return next(n for n in graph.nodes.values() if (n.title, n.kind) == (title, kind))


def fulfilled() -> FulfilmentState:
    order = place_order()
    deliver_due()
    return FulfilmentState.objects.get(order_id=order.pk)


# What it says


def test_before_any_message_the_graph_is_what_is_declared() -> None:
    graph = fulfilment()

    steps = [n.title for n in graph.nodes.values() if n.kind == Kind.STEP]
    assert steps[0] == "begin"
    assert {"pick_stock", "undo", "finish"} < set(steps)
    assert [(e.source, e.target) for e in graph.edges.values() if e.is_declared] == [
        ("outside", "step begin"),
        ("handler orders.ship_order", "step undo"),
    ]
    assert pairs(graph) == set()


def test_deliveries_say_which_step_sent_what_to_whom() -> None:
    fulfilled()

    graph = fulfilment()

    assert pairs(graph) == {
        ("outside", "OrderPlaced", "begin"),
        ("begin", "TakePayment", "orders.take_payment"),
        ("begin", "PaymentOverdue", "give_up"),
        ("orders.take_payment", "PaymentTaken", "pick_stock"),
        ("pick_stock", "PickStock", "orders.pick_stock"),
        ("orders.pick_stock", "StockPicked", "ship"),
        ("ship", "ShipOrder", "orders.ship_order"),
        ("ship", "PutStockBack", "orders.put_stock_back"),
        ("ship", "RefundPayment", "orders.refund_payment"),
        ("orders.ship_order", "OrderShipped", "send_receipt"),
        ("send_receipt", "SendReceipt", "orders.send_receipt"),
        ("orders.send_receipt", "ReceiptSent", "finish"),
    }


def test_it_says_how_often_and_how_long() -> None:
    for _ in range(3):
        fulfilled()
    Delivery.objects.filter(message_name=TakePayment.stored_name()).update(
        created_at="2026-01-01T00:00:00Z",
        started_at="2026-01-01T00:01:00Z",
        ended_at="2026-01-01T00:01:30Z",
    )

    graph = fulfilment()

    payment = node(graph, "orders.take_payment", Kind.HANDLER)
    edge = graph.edges["step begin", payment.key, "orders.TakePayment"]
    assert (payment.handled, payment.seconds) == (3, 30.0)
    assert (edge.count, edge.seconds) == (3, 90.0)


def test_what_was_noted_to_undo_and_never_needed_is_not_counted_as_sent() -> None:
    fulfilled()

    graph = fulfilment()

    edge = graph.edges["step ship", "handler orders.put_stock_back", "orders.PutStockBack"]
    assert (edge.count, edge.undoes) == (0, True)


def test_another_workflow_is_one_box() -> None:
    place_order(amount=Decimal(5000))
    deliver_due()

    graph = fulfilment()

    child = node(graph, "orders.CreditCheckState", Kind.WORKFLOW)
    assert ("begin", "CheckCredit", child.title) in pairs(graph)
    assert (child.title, "CreditChecked", "heed_credit") in pairs(graph)


def test_a_join_runs_once_however_many_messages_arrive() -> None:
    place_batch(4)
    deliver_due()

    graph = graph_of(workflow_named("orders.BatchOrderState"))

    assert node(graph, "weigh").handled == 1
    assert graph.edges["handler orders.pack_parcel", "step weigh", "orders.ParcelPacked"].count == 4
    assert "django_workflows.JoinComplete" not in as_json(graph)


def test_names_that_nothing_declares_any_more_are_shown_as_they_are() -> None:
    stored(handler="gone.handler", sender="orders.FulfilmentState", sender_step="gone_step")

    graph = fulfilment()

    assert ("gone_step", "TakePayment", "gone.handler") in pairs(graph)
    assert node(graph, "gone.handler", Kind.HANDLER).failed == 1


def test_a_message_whose_step_cannot_be_told_is_left_out(own_registry: Any) -> None:
    define_workflow(TallyState).started_by(Begin)(lambda message, state, context: None)
    stored(handler="tests.TallyState", message_name="tests.Unknown", status=Status.PENDING)

    graph = graph_of(workflow_named("tests.TallyState"))

    assert list(graph.nodes) == ["outside", "step <lambda>"]


# Bounds


def test_only_the_newest_deliveries_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        stored(sender="orders.FulfilmentState", sender_step="begin")
    monkeypatch.setattr(reading, "SAMPLE", 3)

    graph = fulfilment()

    assert graph.sampled == 3
    assert graph.since is not None


def test_a_workflow_that_is_rare_is_sampled_from_its_newest_instance_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fulfilled()
    monkeypatch.setattr(reading, "SAMPLE", 20)
    for _ in range(30):
        stored(handler="other.handler")

    graph = fulfilment()

    assert node(graph, "begin").handled == 1


def test_a_graph_takes_few_queries_whatever_has_happened() -> None:
    for _ in range(3):
        instance = fulfilled()

    with CaptureQueriesContext(connection) as captured:
        svg_for(instance)

    assert len(captured) <= 6


# Where an instance is


def test_a_finished_instance_has_been_on_one_way_through() -> None:
    instance = fulfilled()

    graph = fulfilment(instance=instance)

    done = {n.title for n in graph.nodes.values() if n.mark == Mark.DONE and n.kind == Kind.STEP}
    assert done == {"begin", "pick_stock", "ship", "send_receipt", "finish"}
    assert [n.title for n in graph.nodes.values() if n.is_here] == ["finish"]
    assert not graph.edges["step begin", "step give_up", "orders.PaymentOverdue"].is_taken
    assert graph.edges["step ship", "handler orders.ship_order", "orders.ShipOrder"].is_taken


def test_an_instance_waits_for_its_command_and_its_timeout() -> None:
    order = place_order()
    deliver(Delivery.objects.get().pk)
    instance = FulfilmentState.objects.get(order_id=order.pk)

    graph = fulfilment(instance=instance)

    assert node(graph, "begin").is_here
    assert node(graph, "orders.take_payment", Kind.HANDLER).mark == Mark.WAITING
    assert node(graph, "give_up").mark == Mark.WAITING
    assert node(graph, "pick_stock").mark == Mark.NONE


def test_what_failed_for_an_instance_is_marked(settings: Any) -> None:
    settings.SHIPMENT_FAIL_RATE = 1

    graph = fulfilment(instance=fulfilled())

    assert node(graph, "orders.ship_order", Kind.HANDLER).mark == Mark.FAILED
    assert node(graph, "undo").is_here
    assert node(graph, "orders.put_stock_back", Kind.HANDLER).mark == Mark.DONE


def test_what_other_instances_did_marks_nothing() -> None:
    fulfilled()
    first = place_order()
    deliver(Delivery.objects.latest("id").pk)
    instance = FulfilmentState.objects.get(order_id=first.pk)
    Delivery.objects.filter(sender_instance_id=instance.pk).delete()

    graph = fulfilment(instance=instance)

    marked = {n.title for n in graph.nodes.values() if n.mark}
    assert marked == {"begin"}


def test_an_instance_of_a_workflow_that_nothing_declares_has_no_drawing(own_registry: Any) -> None:
    instance = FulfilmentState.objects.create(order_id=uuid.uuid4(), amount=1)

    assert definition_of(instance) is None
    assert svg_for(instance) is None


# The drawings


def drawn(graph: Graph, **how: Any) -> ElementTree.Element:
    return ElementTree.fromstring(as_svg(graph, **how))  # noqa: S314  our own


def test_the_drawing_says_in_words_what_it_shows() -> None:
    svg = drawn(fulfilment(instance=fulfilled()))

    title, desc = svg.find(f"{SVG}title"), svg.find(f"{SVG}desc")
    assert title is not None
    assert desc is not None
    assert svg.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    assert svg.get("role") == "img"
    assert "orders.TakePayment goes from begin to orders.take_payment, 1 times" in (desc.text or "")
    assert "Step finish; on orders.ReceiptSent" in (desc.text or "")


def test_the_drawing_in_a_page_has_nothing_that_a_strict_csp_forbids() -> None:
    svg = as_svg(fulfilment(instance=fulfilled()))

    assert not re.search(r"<style|\sstyle=|<script|\son\w+=|href", svg)


def test_a_drawing_in_a_file_brings_its_colours_along() -> None:
    svg = as_svg(fulfilment(), standalone=True)

    assert "light-dark(" in svg
    assert svg.count("<style>") == 1


@pytest.fixture
def nasty(own_registry: Any) -> Graph:
    """A graph whose every name is as bad as it can be."""
    define_workflow(TallyState).started_by(Begin)(lambda message, state, context: None)
    graph = graph_of(workflow_named("tests.TallyState"))
    graph.workflow = graph.title = NASTY
    target = graph.node(NASTY, Kind.HANDLER, NASTY, [NASTY])
    target.handled = 1
    edge = graph.edge("outside", target.key, NASTY)
    edge.count = 1
    return graph


def test_names_in_the_drawing_are_text_and_nothing_else(nasty: Graph) -> None:
    svg = drawn(nasty)

    assert {element.tag for element in svg.iter()} == {
        f"{SVG}{name}" for name in ("svg", "title", "desc", "g", "rect", "path", "text")
    }
    assert '<script>alert("1")</script>' in "".join(svg.itertext())


def test_names_in_mermaid_cannot_end_their_label(nasty: Graph) -> None:
    mermaid = as_mermaid(nasty)

    labels = re.findall(r'"([^"]*)"', mermaid)
    assert mermaid.count('"') == 2 * len(labels)
    assert not re.search(r"[<>&'`\\\x00\u202e]", "".join(labels).replace("<br/>", ""))
    assert "script" in mermaid


def test_names_in_dot_cannot_end_their_string(nasty: Graph) -> None:
    nasty.node("back", Kind.HANDLER, 'ends in \\"; evil [')

    dot = as_dot(nasty)

    outside = re.sub(r'"(?:[^"\\]|\\.)*"', "S", dot, flags=re.S)
    assert set(re.findall(r"\w+", outside)) <= {
        *("digraph", "node", "edge", "shape", "box", "fontname", "fontsize", "11", "9"),
        *("S", "label", "style", "oval", "peripheries", "color", "penwidth"),
    }
    assert dot.encode()


def test_long_names_are_cut_in_the_box_and_whole_in_its_title() -> None:
    graph = fulfilment()
    graph.node("long", Kind.HANDLER, "x" * 300)

    svg = drawn(graph)

    texts = [element.text or "" for element in svg.iter(f"{SVG}text")]
    assert max(map(len, texts)) <= 40
    assert any("x" * 300 in (element.text or "") for element in svg.iter(f"{SVG}title"))


def test_a_step_that_sends_itself_a_message_has_a_loop(own_registry: Any) -> None:
    tally = define_workflow(TallyState)

    @tally.started_by(Begin, once_per="key")
    def begin(message: Begin, state: TallyState, context: Any) -> None:
        context.send(Again())

    @tally.when(Again)
    def again(message: Again, state: TallyState, context: Any) -> None:
        state.total += 1
        if state.total < 3:
            context.send(Again())

    send(Begin(key="k"))
    deliver_due()

    graph = graph_of(workflow_named("tests.TallyState"))

    assert graph.edges["step again", "step again", "tests.graph.Again"].count == 2
    assert "wg-line" in as_svg(graph)


# Where things go


def test_boxes_are_apart_and_edges_end_at_them() -> None:
    fulfilled()
    keys = [f"box {i}" for i in range(14)]
    sizes = {key: (80.0 + 10 * (i % 5), 40.0) for i, key in enumerate(keys)}
    edges = [
        (keys[i], keys[j])
        for i in range(14)
        for j in range(14)
        if (i * 7 + j * 5) % 11 == 1 and i != j
    ]

    layout = lay_out(sizes, edges)

    boxes = [
        (x - sizes[k][0] / 2, y - 20, x + sizes[k][0] / 2, y + 20)
        for k, (x, y) in layout.boxes.items()
    ]
    assert len(boxes) == 14
    for i, one in enumerate(boxes):
        assert min(one) >= -0.01
        assert one[2] <= layout.width + 0.01
        assert one[3] <= layout.height + 0.01
        for other in boxes[i + 1 :]:
            apart = (
                one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            )
            assert apart
    for (source, target), line in layout.lines.items():
        ends = [
            abs(line[0][1] - layout.boxes[source][1]),
            abs(line[-1][1] - layout.boxes[target][1]),
        ]
        assert ends == pytest.approx([20, 20])


def test_edges_point_down_except_those_that_close_a_circle() -> None:
    edges = [("a", "b"), ("b", "c"), ("c", "a"), ("a", "c")]

    layout = lay_out(dict.fromkeys("abc", (50.0, 20.0)), edges)

    ys = [layout.boxes[key][1] for key in "abc"]
    assert ys == sorted(ys)
    assert layout.turned == back_edges(list("abc"), edges) == {("c", "a")}


def test_no_box_and_no_edge_is_no_drawing_but_no_error_either() -> None:
    assert lay_out({}, []).boxes == {}
    assert "<svg" in as_svg(Graph("empty", "empty"))


# The command


@pytest.fixture
def run() -> Iterator[Callable[..., str]]:
    def call(*arguments: str) -> str:
        out = StringIO()
        call_command("workflow_graph", *arguments, stdout=out)
        return out.getvalue()

    return call


@pytest.mark.parametrize(
    ("chosen", "begins"),
    [
        ([], "flowchart TD\n"),
        (["--format", "dot"], 'digraph "orders.FulfilmentState" {\n'),
        (["--format", "svg"], "<svg "),
        (["--format", "json"], "{\n"),
    ],
    ids=["mermaid", "dot", "svg", "json"],
)
def test_the_command_prints_each_format(
    run: Callable[..., str], chosen: list[str], begins: str
) -> None:
    fulfilled()

    printed = run("orders.FulfilmentState", *chosen)

    assert printed.startswith(begins)
    assert "pick_stock" in printed


def test_the_command_marks_an_instance_and_writes_a_file(
    run: Callable[..., str], tmp_path: Path
) -> None:
    instance, file = fulfilled(), tmp_path / "graph.json"

    run(
        *("orders.FulfilmentState", "--format", "json"),
        *("--instance", str(instance.pk), "--output", str(file)),
    )

    found = json.loads(file.read_text())
    assert found["instance_id"] == str(instance.pk)
    assert [n["title"] for n in found["nodes"] if n["is_here"]] == ["finish"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["orders.FulfilmentStat"], "Did you mean orders.FulfilmentState?"),
        (["orders.take_payment"], "No workflow is named 'orders.take_payment'"),
        (["orders.FulfilmentState", "--instance", "7"], "'7' is not a UUID"),
        (["orders.FulfilmentState", "--instance", str(uuid.UUID(int=7))], "has no instance"),
        (["orders.FulfilmentState", "--output", "/nowhere/at/all"], "cannot be written"),
    ],
)
def test_the_command_says_what_is_wrong(
    run: Callable[..., str], arguments: list[str], said: str
) -> None:
    with pytest.raises(CommandError, match=re.escape(said)):
        run(*arguments)


def test_the_graph_of_a_child_shows_its_parent() -> None:
    place_order(amount=Decimal(5000))
    deliver_due()

    graph = graph_of(workflow_named("orders.CreditCheckState"))

    assert ("orders.FulfilmentState", "CheckCredit", "ask") in pairs(graph)
    assert ("pass_on", "CreditChecked", "orders.FulfilmentState") in pairs(graph)
    assert CreditCheckState.objects.exists()
    assert not BatchOrderState.objects.exists()


def test_a_plain_handler_that_another_workflow_uses_too_is_counted_for_each(
    own_registry: Any,
) -> None:
    @handles(Again)
    def again(message: Again, context: HandlerContext) -> None: ...

    tally = define_workflow(TallyState)

    @tally.started_by(Begin, once_per="key")
    def begin(message: Begin, state: TallyState, context: Any) -> None:
        context.send(Again())

    send(Begin(key="k"))
    send(Again())
    deliver_due()

    graph = graph_of(workflow_named("tests.TallyState"))

    assert node(graph, "tests.again", Kind.HANDLER).handled == 1
