"""NATS and Flux: lines of text, and payloads behind them.

NATS clients, of any language, and Flux's clients speak this. They share the codec (`wire/text.py` draws both) and most
verbs, so they are one dialect. A client that sends CONNECT is a NATS client; one that does not is a Flux client.

On the text port the server speaks first, with INFO. On client-first ports it waits. Then:

    NATS    C: CONNECT {…}   C: PING                  S: PONG            the handshake
            C: SUB orders.> 1
            C: PUB orders.eu 5␍␊hello                 S: MSG orders.eu 1 5␍␊hello
    Flux    C: SUB orders.> 1 group                   S: +OK             a member of a group, which must ACK
            C: PUB orders.eu 5␍␊hello                 S: +OK             when it is stored
                                                      S: MSG orders.eu 1 <sequence> 5␍␊hello
            C: ACK <sequence>                         S: +OK

Replies come in the order of the commands. The reply to a publish waits until the message is as durable as its topic
promises, and so do all replies behind it. A PONG therefore says that everything before it is stored, or was named in
an `-ERR`. It also comes behind the messages that wait for its connection: its own publishes, and its backlog.

    dialect       the match over the events, CONNECT, PING, errors and the end
    input         bytes to events; moves the early PINGs of nats-py behind the publishes that they cover
    publisher     PUB and HPUB, their replies, and "no responders"
    reading       SUB, UNSUB, deliveries, FLOWCTL, STATS, PULL and REPLAY
    acknowledging ACK, and `$ACK.…` of NATS clients
    info          the fields of INFO
"""
