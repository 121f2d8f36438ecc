from typing import Any

from django.core.management.base import CommandParser

from testproject.database import check_migrated
from testproject.orders.management.batch_command import BatchCommand, at_least_one


class Command(BatchCommand):
    help = "Place orders; workers that run elsewhere (rundramatiq) fulfil them."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("orders", type=at_least_one, metavar="N", help="How many.")
        parser.add_argument(
            "--wait",
            action="store_true",
            help="Wait until every order has ended; exit with 1 when one has not. A database "
            "that restarts meanwhile is waited for.",
        )
        super().add_arguments(parser)

    def handle(self, **options: Any) -> None:
        batch = self.new_batch(options["orders"], options)
        check_migrated(batch.variant.order._meta.db_table)
        summary = self.follow(batch, options, wait=options["wait"])
        self.report(summary, options)
        if options["wait"]:
            self.fail_if_unfinished(summary, options)
