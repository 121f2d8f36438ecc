from django.apps import AppConfig


class OrdersFunctionsConfig(AppConfig):
    name = "testproject.orders_functions"
    label = "orders_functions"
    verbose_name = "Orders (functions)"
    default_auto_field = "django.db.models.BigAutoField"
