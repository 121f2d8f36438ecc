from django.contrib import admin

from testproject.orders.admin import OrderAdmin, RowPerOrderAdmin
from testproject.orders_functions.models import Order, Payment, Pick, Receipt, Shipment

admin.site.register(Order, OrderAdmin)
admin.site.register([Payment, Pick, Shipment, Receipt], RowPerOrderAdmin)
