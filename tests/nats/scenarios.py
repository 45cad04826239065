"""Scenarios by name: see `tests.nats.scenario` for how they are written."""

from __future__ import annotations

from typing import Final

SCENARIOS: Final = {
    # ---- publish and subscribe
    "publish to another connection": """
a SUB ~.x 1
b PUB ~.x =hello
b PUB ~.x =
b PUB ~.y =other
""",
    "publish to oneself": """
a SUB ~.x 1
  PUB ~.x =hello
""",
    "publish to a new topic": """
a SUB ^ 1
  SUB ^.> 2
b PUB ^ =0
  PUB ^.x =1
""",
    "reply subject": """
a SUB ~.x 1
b PUB ~.x ~.reply =hello
b PUB ~.x _INBOX.# =hello
""",
    "star and rest": """
a SUB ~.*.created 1
  SUB ~.us.> 2
b PUB ~.us.created =0
b PUB ~.us =1
b PUB ~.us.created.now =2
b PUB ~.eu.x.created =3
b PUB ~.eu.created =4
""",
    "everything": """
a SUB > 1
b PUB ~.x =0
  PUB _INBOX.# =1
""",
    "a star in front": """
a SUB *.#.x 1
b PUB ~a.x =0
b PUB ~b.x =1
""",
    "one sid twice": """
a SUB ~.x 1
  SUB ~.y 1
b PUB ~.x =0
b PUB ~.y =1
a UNSUB 1
b PUB ~.x =2
  PUB ~.y =3
""",
    "two subscriptions to one subject": """
a SUB ~.x 1
  SUB ~.x 2
b 10x PUB ~.x =m%d
""",
    "spaces and tabs": """
a RAW SUB \\t ~.x  \\t 1 \\r\\n
b RAW PUB  ~.x\\t 2 \\r\\nhi\\r\\n
b RAW pub ~.x 2\\r\\nhi\\r\\n
b ping
""",
    "byte by byte": """
a SUB ~.x 1
b& RAW PU
b& RAW B ~.x
b& RAW  5\\r
b& RAW \\nhe
b& RAW llo
b RAW \\r\\n
""",
    "a payload with line ends": """
a SUB ~.x 1
b RAW PUB ~.x 6\\r\\n\\r\\n\\r\\n\\r\\n\\r\\n
""",
    "sid of letters": """
a SUB ~.x abc.def
b PUB ~.x =hello
""",
    # ---- order
    "a pong follows the messages it covers": """
a SUB ~.x 1
  PUB ~.x =0
  PING
  PUB ~.x =1
  PING
""",
    "a pong follows the messages of a new topic": """
a SUB ^ 1
  PUB ^ =0
  PING
""",
    "order over topics": """
a SUB ~a.x 1
  SUB ~b.x 2
  SUB ~c.x 3
b PUB ~a.x =0
  PUB ~b.x =0
  PUB ~c.x =0
b 20x PUB ~a.x =a%d
  20x PUB ~b.x =b%d
  20x PUB ~c.x =c%d
  20x PUB ~a.x =d%d
""",
    "order over topics on one subscription": """
a SUB *.#.x 1
b PUB ~a.x =0
  PUB ~b.x =1
  PUB ~a.x =2
  PUB ~c.x =3
  PUB ~b.x =4
""",
    "a reply does not overtake events": """
a SUB ~.events 1
  SUB _INBOX.# 2
b 20x PUB ~.events =e%d
  PUB _INBOX.# =reply
""",
    "an event does not overtake a reply": """
a SUB ~.events 1
  SUB _INBOX.# 2
b PUB _INBOX.# =reply
  PUB ~.events =event
  PUB _INBOX.# =reply
""",
    "a reply does not overtake events though its subscription ends": """
a SUB ~.> 1
  SUB _INBOX.# 2
a PUB ~.x =event
  PUB _INBOX.# =reply
  UNSUB 2
""",
    "a reply does not overtake events though a queue group ends": """
a SUB ~.> 1
  SUB _INBOX.> 2
  SUB _INBOX.* workers# 3
a PUB ~.x =event
  PUB _INBOX.# =reply
  UNSUB 3
""",
    "a reply does not overtake events though its subscription gets a max": """
a SUB ~.> 1
  SUB _INBOX.> 2
  SUB _INBOX.* 3
a PUB ~.x =event
  PUB _INBOX.# =reply
  UNSUB 3 2
  3x PUB _INBOX.# =reply%d
""",
    "a max counts stored and unstored messages in order": """
a SUB > 1
a PUB ~.x =0
  PUB _INBOX.# =1
  PUB ~.x =2
  UNSUB 1 5
  PUB _INBOX.# =3
  PUB ~.x =4
  PUB _INBOX.# =5
  PUB ~.x =6
""",
    "order between subscriptions": """
a SUB ~.x 1
  SUB ~.* 2
b PUB ~.x =0
  PUB ~.y =1
  PUB ~.x =2
""",
    # ---- unsubscribe and drain
    "unsubscribe": """
a SUB ~.x 1
b PUB ~.x =0
a UNSUB 1
b PUB ~.x =1
""",
    "unsubscribe an unknown sid": """
a UNSUB 7
a UNSUB 7 5
""",
    "unsubscribe after max": """
a SUB ~.x 1
  UNSUB 1 2
b 4x PUB ~.x =m%d
""",
    "unsubscribe after a max that is reached": """
a SUB ~.x 1
b 3x PUB ~.x =m%d
a UNSUB 1 2
b PUB ~.x =more
""",
    "unsubscribe after a max that is partly used": """
a SUB ~.x 1
b 3x PUB ~.x =m%d
a UNSUB 1 5
b 4x PUB ~.x =n%d
""",
    "unsubscribe with max 0": """
a SUB ~.x 1
  UNSUB 1 0
b PUB ~.x =0
""",
    "change max": """
a SUB ~.x 1
  UNSUB 1 5
b 2x PUB ~.x =m%d
a UNSUB 1 3
b 3x PUB ~.x =n%d
""",
    "subscribe again after max": """
a SUB ~.x 1
  UNSUB 1 1
b 2x PUB ~.x =m%d
a SUB ~.x 1
b 2x PUB ~.x =n%d
""",
    "drain one's own messages": """
a SUB ~.x 1
  100x PUB ~.x =m%d
  UNSUB 1
  PING
""",
    "drain several subscriptions": """
a SUB ~.x 1
  SUB ~.y 2
  50x PUB ~.x =m%d
  50x PUB ~.y =m%d
  UNSUB 1
  UNSUB 2
  PING
""",
    "publish, unsubscribe, publish": """
a SUB ~.x 1
  PUB ~.x =0
  UNSUB 1
  PUB ~.x =1
  PING
""",
    "unsubscribe and subscribe at once": """
a SUB ~.x 1
  PUB ~.x =0
  UNSUB 1
  SUB ~.x 2
  PUB ~.x =1
  PING
""",
    "a slow reader drains": """
a SLOW
a SUB ~.x 1
a PAUSE
b 2000x PUB ~.x =x*10000
a UNSUB 1
  PING
a RESUME
""",
    "a slow reader catches up": """
a SLOW
a SUB ~.x 1
a PAUSE
b 1000x PUB ~.x =x*10000
b 10x PUB ~.x =m%d
a RESUME
b PUB ~.x =live
""",
    # ---- queue groups
    "queue group": """
a SUB ~.x w# 1
b SUB ~.x w# 1
c 20x PUB ~.x =m%d
""",
    "queue group and plain": """
a SUB ~.x w# 1
  SUB ~.x 2
b SUB ~.x w# 1
  SUB ~.x v# 2
c 20x PUB ~.x =m%d
""",
    "one queue name on overlapping patterns, and no echo": """
a OPEN {"echo": false}
a SUB ~.* v# 1
b SUB ~.x v# 2
c SUB ~.> v# 3
a PUB ~.x =0
  PUB ~.y =1
b PUB ~.x =2
  PUB ~.y =3
""",
    "one queue name on overlapping patterns": """
a SUB ~.* w# 1
b SUB ~.> w# 1
c 20x PUB ~.x =m%d
""",
    "one queue name on overlapping patterns of one connection": """
a SUB ~.x w# 1
  SUB ~.* w# 2
  SUB ~.> w# 3
b 20x PUB ~.x =m%d
b 5x PUB ~.x.y =n%d
""",
    "a queue subscription is replaced at once": """
b SUB ~.y w# 1
b 3x PUB ~.y =m%d
  UNSUB 1
  SUB ~.y w# 2
  PUB ~.y =n
  UNSUB 2
  SUB ~.> w# 3
  PUB ~.y =o
""",
    "one after the other of a queue name leaves": """
b SUB ~.y w# 1
  SUB ~.> w# 2
b 3x PUB ~.y =m%d
  UNSUB 1
  2x PUB ~.y =n%d
  UNSUB 2
  SUB ~.* w# 3
  PUB ~.y =o
  PING
  PUB ~.y =p
""",
    "one queue name on other subjects": """
a SUB ~.x w# 1
b SUB ~.y w# 1
c PUB ~.x =0
  PUB ~.y =1
""",
    "a member of a queue group leaves": """
a SUB ~.x w# 1
b SUB ~.x w# 1
c 5x PUB ~.x =m%d
a UNSUB 1
c 5x PUB ~.x =n%d
b UNSUB 1
c 5x PUB ~.x =o%d
""",
    "a member of a queue group is killed": """
a SUB ~.x w# 1
b SUB ~.x w# 1
c 5x PUB ~.x =m%d
a KILL
c 5x PUB ~.x =n%d
""",
    "queue groups of an inbox": """
a SUB _INBOX.#.* w# 1
b SUB _INBOX.#.> w# 1
c 10x PUB _INBOX.#.x =m%d
""",
    # ---- request and reply
    "request": """
a SUB _INBOX.#.* 1
b SUB ~.service 1
a PUB ~.service _INBOX.#.1 =question
b PUB _INBOX.#.1 =answer
""",
    "no responders": """
a SUB _INBOX.# 1
a PUB ~.service _INBOX.# =question
a PUB ^ _INBOX.# =question
a PUB _INBOX.#.other _INBOX.# =question
""",
    "no responders is not asked for": """
a OPEN {"no_responders": false}
a SUB _INBOX.# 1
a PUB ~.service _INBOX.# =question
""",
    "no responders, and nobody listens to the reply": """
a PUB ~.service _INBOX.# =question
  PING
""",
    "no responders on a stored reply subject": """
a SUB ~.reply 1
a PUB ~.service ~.reply =question
  PING
""",
    "no responders with a wildcard inbox": """
a SUB _INBOX.#.* 1
a PUB ~.service _INBOX.#.1 =question
""",
    "no responders but oneself": """
a OPEN {"echo": false}
a SUB _INBOX.# 1
  SUB ~.service 2
a PUB ~.service _INBOX.# =question
""",
    "no responders after the last one left": """
a SUB _INBOX.# 1
b SUB ~.service w# 1
a PUB ~.service _INBOX.# =0
b UNSUB 1
a PUB ~.service _INBOX.# =1
""",
    "no responders after the last one was killed": """
a SUB _INBOX.# 1
b SUB ~.service 1
a PUB ~.service _INBOX.# =0
b KILL
a PUB ~.service _INBOX.# =1
""",
    "no responders once a max is reached": """
a SUB _INBOX.# 1
  SUB ~.x 2
  UNSUB 2 1
  PUB ~.x _INBOX.# =0
  PUB ~.x _INBOX.# =1
""",
    "no responders takes its turn": """
a SUB _INBOX.# 1
  SUB ~.x 2
a PUB ~.x =0
  PUB ~.service _INBOX.# =question
  PUB ~.x =1
  PING
""",
    "no responders without headers": """
a OPEN {"headers": false}
a SUB _INBOX.# 1
a PUB ~.service _INBOX.# =question
""",
    # ---- headers
    "headers": """
a SUB ~.x 1
b HPUB ~.x {A: 1; B: 2} =hello
b HPUB ~.x ~.reply {A: 1; a: 2; A: 3} =
b HPUB ~.x {} =empty
""",
    "headers to a client without": """
a OPEN {"headers": false, "no_responders": false}
a SUB ~.x 1
b HPUB ~.x {A: 1} =hello
b HPUB ~.x ~.reply {A: 1} =hello
""",
    "headers from a client without": """
a OPEN {"headers": false, "no_responders": false}
a HPUB ~.x {A: 1} =hello
""",
    "odd headers": """
a SUB ~.x 1
b RAW HPUB ~.x 12 14\\r\\nNATS/1.0\\r\\n\\r\\nhi\\r\\n
b RAW HPUB ~.x 20 22\\r\\nNATS/1.0 404 Not\\r\\n\\r\\nhi\\r\\n
b RAW HPUB ~.x 17 19\\r\\nNATS/1.0\\r\\nA:1\\r\\n\\r\\nhi\\r\\n
b RAW HPUB ~.x 23 25\\r\\nNATS/1.0\\r\\nA:  1 : 2\\r\\n\\r\\nhi\\r\\n
""",
    "headers that are none": """
a SUB ~.x 1
b RAW HPUB ~.x 6 8\\r\\nabcdefhi\\r\\n
""",
    "header length beyond the total": """
a RAW HPUB ~.x 20 10\\r\\nNATS/1.0\\r\\n\\r\\n
""",
    # ---- headers with a meaning for Penstock
    "a message ID twice": """
a SUB ~.x 1
b HPUB ~.x {Nats-Msg-Id: #} =0
b HPUB ~.x {Nats-Msg-Id: #} =1
""",
    "a delayed message": """
a SUB ~.x 1
b HPUB ~.x {Delay: 1h} =later
""",
    # ---- options
    "verbose": """
a OPEN {"verbose": true}
a SUB ~.x 1
a PUB ~.y =0
a UNSUB 1
a PING
a HPUB ~.y {A: 1} =0
a UNSUB 1 3
""",
    "verbose to oneself": """
a OPEN {"verbose": true}
a SUB ~.x 1
  PUB ~.x =0
  PUB ~.x =1
  PING
""",
    "no echo": """
a OPEN {"echo": false}
a SUB ~.x 1
  SUB _INBOX.# 2
b SUB ~.x 1
a PUB ~.x =0
  PUB _INBOX.# =1
b PUB ~.x =2
""",
    "no echo in a queue group": """
a OPEN {"echo": false}
a SUB ~.x w# 1
a 3x PUB ~.x =m%d
b SUB ~.x w# 1
a 3x PUB ~.x =n%d
""",
    "connect twice": """
a OPEN {"verbose": true}
a SUB ~.x 1
a CONNECT {"verbose": false, "echo": false}
a PUB ~.x =0
""",
    "credentials that nobody asked for": """
a OPEN {"user": "ann", "pass": "secret", "auth_token": "secret"}
a SUB ~.x 1
b OPEN {"nkey": "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4", "sig": "c2lnbmVk"}
b PUB ~.x =0
c OPEN {"jwt": "eyJ0eXAiOiJKV1QifQ.e30.c2lnbmVk", "sig": "c2lnbmVk"}
c PUB ~.x =1
""",
    "pedantic": """
a OPEN {"pedantic": true}
a SUB ~.> 1
a PUB ~.x =0
a PUB ~.* =1
a PUB ~..x =2
a SUB ~.x 2
a PUB ~.x =3
""",
    # ---- subjects that are not subjects
    "publish to a wildcard": """
a SUB ~.* 1
b PUB ~.* =0
b PUB ~.x =1
""",
    "publish to an empty token": """
a SUB ~.> 1
b PUB ~..x =0
b PUB ~. =1
b PUB .~ =2
b PUB ~.x =3
""",
    "publish to a long subject": """
a SUB ~.> 1
b PUB ~."""
    + "x" * 1100
    + """ =hi
b PUB ~.x =after
""",
    "publish to a subject that is not UTF-8": """
a SUB ~.> 1
b RAW PUB ~.\\xff\\xfe 2\\r\\nhi\\r\\n
b PUB ~.x =after
""",
    "odd reply subjects": """
a SUB ~.x 1
b PUB ~.x ~.* =0
b PUB ~.x ~..y =1
b PUB ~.x ~. =2
b PUB ~.x =3
""",
    "subscribe to what is not a pattern": """
a SUB ~..x 1
a SUB ~.>.x 2
a SUB .~ 3
a SUB ~. 4
a SUB ~.x 5
b PUB ~.x =0
""",
    "wildcards within a token": """
a SUB ~.x* 1
  SUB ~.>x 2
b PUB ~.x* =0
b PUB ~.>x =1
b PUB ~.xy =2
""",
    "reserved subjects": """
a SUB _INBOX.# 1
a PUB $JS.API.INFO _INBOX.# =
a PUB $SYS.REQ.SERVER.PING _INBOX.# =
a PUB $KV.bucket.key _INBOX.# =x
a PUB $O.bucket.x _INBOX.# =x
a PUB $SRV.PING _INBOX.# =
""",
    "services": """
a SUB $SRV.PING 1
  SUB $SRV.PING.x# 2
b SUB _INBOX.# 1
b PUB $SRV.PING _INBOX.# =
b PUB $SRV.PING.x# _INBOX.# =
a PUB _INBOX.# =pong
""",
    "subscribe to reserved subjects": """
a SUB $JS.> 1
  SUB $SYS.> 2
  SUB $KV.#.> 3
b PUB $KV.#.x =0
""",
    # ---- limits
    "the largest payload": """
a SUB ~.x 1
b PUB ~.x =x*1048576
b PUB ~.x =after
""",
    "a payload that is too large": """
a SUB ~.x 1
b PUB ~.x =x*1048577
a PUB ~.x =after
""",
    "headers and payload together too large": """
b HPUB ~.x {A: 1} =x*1048576
""",
    "a line that is too long": """
a RAW SUB ~."""
    + "x" * 5000
    + """ 1\\r\\n
""",
    # ---- what is not the protocol
    "an unknown verb": """
a NONSENSE
""",
    "an error is not the end of other connections": """
a SUB ~.x 1
b SUB ~.x 1
b NONSENSE
c PUB ~.x =0
""",
    "messages before an error are published": """
a SUB ~.x 1
b PUB ~.x =0
  NONSENSE
""",
    "a payload longer than it says": """
a RAW PUB ~.x 2\\r\\nhello\\r\\n
""",
    "sizes that are none": """
a RAW PUB ~.x -1\\r\\n
b RAW PUB ~.x x\\r\\n
c RAW PUB ~.x\\r\\n
d RAW PUB ~.x 99999999999999999999\\r\\n
""",
    "sub without a sid": """
a RAW SUB ~.x\\r\\n
b RAW UNSUB\\r\\n
c RAW SUB\\r\\n
""",
    "max that is none": """
a SUB ~.x 1
a RAW UNSUB 1 x\\r\\n
b PUB ~.x =0
""",
    "info from a client": """
a RAW INFO {}\\r\\n
""",
    "pong and ok from a client": """
a PONG
a RAW +OK\\r\\n
""",
    "a message from a client": """
a RAW MSG ~.x 1 2\\r\\nhi\\r\\n
""",
}
