from django.contrib import admin

from testproject.orders.models import Order, Payment, Pick, Receipt, Shipment


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ("id", "amount", "batch", "placed_at")
    search_fields = ("=id", "=batch")
    show_full_result_count = False


@admin.register(Payment, Pick, Shipment, Receipt)
class RowPerOrderAdmin(admin.ModelAdmin):
    list_display = ("order_id", "created_at")
    search_fields = ("=order_id",)
    show_full_result_count = False
