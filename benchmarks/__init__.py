"""Measurements on the test project; README.md says how to read them."""

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
django.setup()
