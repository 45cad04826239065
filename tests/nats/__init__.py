"""Run the same scenarios on nats-server and on `penstock serve`, and compare what clients receive."""
