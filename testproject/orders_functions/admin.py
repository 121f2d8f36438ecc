from django.contrib import admin

from testproject.orders.admin import OrderAdmin, ParcelAdmin, RowPerOrderAdmin
from testproject.orders_functions.models import (
    Order,
    Parcel,
    Payment,
    Pick,
    Receipt,
    Refund,
    Restock,
    Shipment,
)

admin.site.register(Order, OrderAdmin)
admin.site.register([Payment, Refund, Pick, Restock, Shipment, Receipt], RowPerOrderAdmin)
admin.site.register(Parcel, ParcelAdmin)
