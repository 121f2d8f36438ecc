from django.contrib import admin
from django.contrib.staticfiles.views import serve
from django.urls import path

urlpatterns = [
    path("admin/", admin.site.urls),
    # The admin's CSS from `runserver`, which serves it by itself only with DEBUG.
    path("static/<path:path>", serve, {"insecure": True}),
]
