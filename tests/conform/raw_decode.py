"""The decode role of `raw_engine`."""

import json

from raw_engine import Engine, packed, tell
from raw_session import FLAW, GROUPS, ROW_BYTES, positions_of, row


class Decode(Engine):
    def do_fetch(self, name, rest):
        if FLAW == "fetches_nothing":
            return
        first_token, num_tokens, ticket = rest.split(" ", 2)
        tokens = int(first_token), int(num_tokens)
        tables = {
            group["name"]: self.take(group["name"], positions_of(group, *tokens))
            for group in GROUPS
        }
        fetch_id = "always" if FLAW == "one_fetch_id" else f"fetch-{name}"
        self.jobs[name] = {"tables": tables, "tokens": tokens, "fetch": fetch_id}
        ticket = json.loads(ticket)
        if FLAW == "ticket_letters":
            ticket["a_later_field"] = ticket["a_later_field"].encode("ascii", "replace").decode()
        if FLAW == "ticket_fields":
            ticket.pop("a_later_field")
        body = {
            "fetch_id": fetch_id,
            "ticket": ticket,
            "first_token": tokens[0] if FLAW != "from_zero" else 0,
            "num_tokens": tokens[1],
            "tables": packed(tables),
        }
        if FLAW == "no_empty_tables":
            body["tables"] = {k: v for k, v in body["tables"].items() if v["ids"]}
        self.begin(name, "fetch", body, self.on_fetch)

    def on_fetch(self, name, _):
        if name in self.jobs:
            self.jobs[name]["taken"] = True
        if FLAW == "uses_early":
            self.jobs[name]["early"] = self.num_wrong(name)
        if FLAW == "writes_early":
            job = self.jobs[name]
            for rank, *_, at in self.slots(job, *job["tokens"]):
                self.maps[rank][at] = 0

    def num_wrong(self, name):
        job, num_wrong = self.jobs[name], 0
        for rank, *which, at in self.slots(job, *job["tokens"]):
            have = self.maps[rank][at : at + ROW_BYTES]
            num_wrong += sum(a != b for a, b in zip(have, row(int(name), *which), strict=True))
        return num_wrong

    def do_cancel(self, name):
        if FLAW == "no_cancel":
            return
        self.control.ask("cancel", {"fetch_id": self.jobs[name]["fetch"]}, lambda _: None)
        if FLAW == "reuses_cancelled":
            self.give_back(self.jobs[name])
            self.jobs[name]["tables"] = {}

    def on_notice(self, op, body):
        if op not in ("fetched", "blocks_freed"):
            return
        found = (one for one, job in self.jobs.items() if job["fetch"] == body["fetch_id"])
        name = next(found, None)
        if name is None or (FLAW == "reply_first" and "taken" not in self.jobs[name]):
            return
        if op == "blocks_freed":
            self.give_back(self.jobs.pop(name))
            return
        self.tell_end(name, body)
        free = body["blocks_free"] or FLAW == "reuses_early"
        if free and FLAW != "blocks_lost":
            self.give_back(self.jobs.pop(name))

    def tell_end(self, name, body):
        outcome = body["outcome"]
        if FLAW == "failed_is_used" and outcome == "failed":
            outcome = "completed"
        if FLAW == "end_not_told":
            return
        if outcome != "completed":
            tell("fetched", name, outcome)
            return
        num_wrong = 0 if FLAW == "does_not_look" else self.num_wrong(name)
        tell("fetched", name, outcome, self.jobs[name].get("early", num_wrong))


if __name__ == "__main__":
    Decode().run()
