from django.db import models

from django_workflows.models import WorkflowState


class RightState(WorkflowState):
    number = models.IntegerField(default=0)
    day = models.DateField(null=True, db_index=True)


class ProxyState(RightState):
    class Meta:
        proxy = True


class ReservedState(WorkflowState):
    lifecycle = models.IntegerField(default=0)


class FirstState(WorkflowState):
    workflow_name = "broken.same"


class SecondState(WorkflowState):
    workflow_name = "broken.same"


class UnstartedState(WorkflowState):
    pass
