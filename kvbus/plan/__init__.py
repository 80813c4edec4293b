"""The command ``kvbus plan``: what a handoff would read from whom, and how long it would take.

No agent is started and no KV memory is allocated: engines are specs, their addresses synthetic.
"""
