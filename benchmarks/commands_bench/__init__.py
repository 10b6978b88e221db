"""What commands take on a real S3 server that holds many versions."""
