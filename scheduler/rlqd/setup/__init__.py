"""`rlqd install` and `rlqd uninstall`: the daemon as a service of systemd.

unit.py     the text of the unit file; reads what is shipped, writes nothing
reach.py    whether other users can run a program, and replace it: looks, changes nothing
service.py  the one place that runs systemctl and asks the daemon that runs
verbs.py    the two commands
"""
