import os

from django_workflows import Command, Event


class Placed(Event):
    number: int


class Act(Command):
    pass


if os.environ.get("HIDDEN") == "field":

    class Hiding(Event):
        copy: str
