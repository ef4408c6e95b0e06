def process(msg):
    if msg.get("kind") == "bad":
        raise ValueError("bad message")
