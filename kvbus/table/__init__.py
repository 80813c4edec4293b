"""The base of the sans-IO state machines (pure), for offers, fetches, slots and reads.

table         live and retired entries, transitions, deadlines, histories, one way to apply an
              event, and the driver of a table in an event loop
events        events and commands that several tables share
"""
