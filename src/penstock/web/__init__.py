"""An HTTP port that is safe to open to strangers, and endpoints that are declared once for serving and describing."""
