"""Found by the workers' own autodiscovery."""

from tests.patient.declared import declare

declare()
