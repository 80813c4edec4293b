"""The prefill role of `raw_engine`."""

import json
import time

from raw_engine import Engine, packed, tell
from raw_session import BLOCK, FLAW, GROUPS, ROW_BYTES, positions_of, row


class Prefill(Engine):
    def do_offer(self, name, counts):
        if FLAW == "offers_nothing":
            return
        counts = [int(count) for count in counts.split()]
        job = self.jobs[name] = {"tables": {}, "counts": counts, "offer": None, "done": 0}
        for group in GROUPS:
            whole = (0, counts[0]) if len(counts) > 1 else positions_of(group, 0, counts[0])
            job["tables"][group["name"]] = self.take(group["name"], whole)
        if FLAW != "late_numbers":
            self.fill(name, job, counts[0])
        body = {
            "request_id": name,
            "num_tokens": counts[0],
            "tables": packed(job["tables"]),
            "sealed": len(counts) == 1,
        }
        if FLAW == "first_block" and len(counts) == 1:
            body["tables"]["tail"]["first_block"] = 0
        self.begin(name, "offer", body, self.on_offer)
        if FLAW == "late_numbers":
            time.sleep(1.0)
            self.fill(name, job, counts[0])

    def fill(self, name, job, num_tokens):
        seed = int(name)
        for rank, *which, at in self.slots({"tables": job["tables"]}, 0, num_tokens):
            if FLAW == "heads_swapped":
                which[3] ^= 1
            self.maps[rank][at : at + ROW_BYTES] = row(seed, *which)
        job["done"] = num_tokens

    def on_offer(self, name, reply):
        job, ticket = self.jobs.get(name), reply["ticket"]
        if job is None:
            return
        job["offer"] = reply["offer_id"]
        if FLAW == "ticket_letters":
            ticket["a_later_field"] = ticket["a_later_field"].encode("ascii", "replace").decode()
        if FLAW == "ticket_fields":
            ticket.pop("a_later_field")
        tell("ticket", name, json.dumps(ticket))
        if FLAW == "reuses_offered":
            self.give_back(job)
            job["tables"] = {}
        self.grow(name, job)

    def grow(self, name, job):
        """Announce what comes after the first tokens, one step after the other."""
        counts = job["counts"][1:]
        for number, num_tokens in enumerate(counts):
            tables = {}
            for group in GROUPS:
                ids, first = job["tables"][group["name"]]
                missing = -(-num_tokens // BLOCK) - first - len(ids)
                new = [self.take_one(group["name"]) for _ in range(max(0, missing))]
                if FLAW == "extends_with_all":
                    tables[group["name"]] = (ids + new, first)
                elif new:
                    tables[group["name"]] = (new, first + len(ids))
                job["tables"][group["name"]] = (ids + new, first)
            self.fill(name, job, num_tokens)
            body = {"offer_id": job["offer"], "num_tokens": num_tokens, "tables": packed(tables)}
            last = number == len(counts) - 1
            self.control.ask("extend", body, lambda _: None)
            if last and FLAW != "never_sealed":
                self.control.ask("seal", {"offer_id": job["offer"]}, lambda _: None)

    def do_withdraw(self, name):
        self.control.ask("withdraw", {"offer_id": self.jobs[name]["offer"]}, lambda _: None)
        if FLAW == "reuse_withdrawn":
            self.give_back(self.jobs[name])

    def on_notice(self, op, body):
        if op == "released":
            known = self.jobs.get(body["request_id"], {}).get("offer")
            if FLAW == "reply_first" and body["offer_id"] != known:
                return
            job = self.jobs.pop(body["request_id"], None)
            if job and FLAW != "blocks_lost":
                self.give_back(job)
            if FLAW != "end_not_told":
                tell("released", body["request_id"], body["outcome"])


if __name__ == "__main__":
    Prefill().run()
