"""The tests' settings with the theme django-unfold, and two sites with admins of one's own."""

from tests.settings import *

INSTALLED_APPS = ["unfold", *INSTALLED_APPS]
ROOT_URLCONF = "tests.themed.urls"
SECURE_CSP = {}  # the theme evaluates what stands in its pages
