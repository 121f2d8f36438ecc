"""What stands outside every app of the broken project, where the tests are no app."""

from django_workflows import Event


class Stray(Event):
    pass
