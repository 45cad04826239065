"""Who a client is, what it may do, and how much. `security.py` is the whole of it, as the server uses it.

users_file.py      the file of users and roles: read, checked, written, watched
users.py           users as they are served, with the permissions of their roles, by every credential
permissions.py     actions, and the rules that allow and deny them
identity.py        the user of one connection, and `authorize`, which every door calls
passwords.py       Argon2id, in few threads · nkeys.py: Ed25519 keys of NATS clients
throttle.py        failed logins: delays and lock-outs
quotas.py          limits of one user, and what it uses of them
audit.py           what happened: who, from where, what, result
"""
