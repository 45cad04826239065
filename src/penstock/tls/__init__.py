"""TLS: certificates and who they name, contexts for servers and clients, and the transport of every connection."""
