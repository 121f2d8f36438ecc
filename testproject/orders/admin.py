from django.contrib import admin

from testproject.orders.models import (
    Order,
    Parcel,
    Payment,
    Pick,
    Receipt,
    Refund,
    Restock,
    Shipment,
)


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ("id", "amount", "batch", "placed_at")
    search_fields = ("=id", "=batch")
    show_full_result_count = False


@admin.register(Payment, Refund, Pick, Restock, Shipment, Receipt)
class RowPerOrderAdmin(admin.ModelAdmin):
    list_display = ("order_id", "created_at")
    search_fields = ("=order_id",)
    show_full_result_count = False


@admin.register(Parcel)
class ParcelAdmin(admin.ModelAdmin):
    list_display = ("batch_id", "number", "grams")
    search_fields = ("=batch_id",)
    show_full_result_count = False
