#!/usr/bin/env python
"""The test project's commands: `python manage.py demo --orders 100` is a good start."""

import os
import sys

from django.core.exceptions import ImproperlyConfigured
from django.core.management import execute_from_command_line


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:  # a sentence for whoever set the variable, no traceback
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
