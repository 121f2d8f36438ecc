"""The tests' settings with the app whose handlers kill and stall."""

from tests.settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "tests.deadly"]
