"""Visits every page of ours on both sites and prints what it met, as JSON."""

import json

import django

django.setup()

from django.contrib.auth.models import User  # noqa: E402
from django.test import Client  # noqa: E402

from django_workflows.models import Delivery  # noqa: E402
from testproject.orders.models import FulfilmentState  # noqa: E402
from tests.pages import buttons_on, confirm, press  # noqa: E402

client = Client()
client.force_login(User.objects.get())
delivery, instance = Delivery.objects.get(), FulfilmentState.objects.get()
found = {}

for site in ("admin", "backoffice"):
    deliveries, states = f"/{site}/django_workflows/delivery/", f"/{site}/orders/fulfilmentstate/"
    pages = {
        "deliveries": deliveries,
        "failed": f"{deliveries}failed/",
        "delivery": f"{deliveries}{delivery.pk}/change/",
        "edit": f"{deliveries}{delivery.pk}/edit-body/",
        "instances": states,
        "instance": f"{states}{instance.pk}/change/",
    }
    for name, path in pages.items():
        response = client.get(path)
        found[f"{site} {name}"] = response.status_code
        found[f"{site} {name} text"] = response.text
    page = client.get(pages["delivery"])
    found[f"{site} buttons"] = buttons_on(page)
    asked = press(client, page, "replay_selected")
    found[f"{site} asked"] = asked.status_code
    confirm(client, asked)
    found[f"{site} replayed"] = Delivery.objects.get().status
    Delivery.objects.update(status="failed", relay_at=None)

print(json.dumps(found))  # noqa: T201
