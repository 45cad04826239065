"""The doors: connections of clients, in every protocol that they speak.

`dialect.py` says how a session and a dialect work together. Each dialect has a folder of its own.
"""
