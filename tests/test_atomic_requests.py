"""Publishing in a view under ATOMIC_REQUESTS."""

from typing import Any

import pytest
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from django_workflows import Event, HandlerContext, handles, publish
from django_workflows.models import Delivery
from tests.delivering import deliver_due
from tests.models import Note

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


class Counted(Event):
    key: str


def count_and_break(request: HttpRequest) -> HttpResponse:
    Note.objects.create(text="of the view")
    publish(Counted(key="view"))
    raise RuntimeError("answers 500")


def count_and_answer(request: HttpRequest) -> HttpResponse:
    Note.objects.create(text="of the view")
    publish(Counted(key="view"))
    return HttpResponse("counted")


urlpatterns = [path("break/", count_and_break), path("answer/", count_and_answer)]


@pytest.fixture
def client_of_atomic_requests(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Client:
    settings.ROOT_URLCONF = __name__
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)

    @handles(Counted)
    def count(message: Counted, context: HandlerContext) -> None:
        Note.objects.create(text="of the handler")

    return Client(raise_request_exception=False)


# B17
def test_a_request_that_answers_500_has_published_nothing(
    client_of_atomic_requests: Client,
) -> None:
    response = client_of_atomic_requests.get("/break/")
    deliver_due()

    assert response.status_code == 500
    assert not Delivery.objects.exists()
    assert not Note.objects.exists()


# B17, the twin
def test_a_request_that_answers_200_has_published(client_of_atomic_requests: Client) -> None:
    response = client_of_atomic_requests.get("/answer/")
    deliver_due()

    assert response.status_code == 200
    assert sorted(Note.objects.values_list("text", flat=True)) == ["of the handler", "of the view"]
