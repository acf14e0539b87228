"""Certificates for clusters that are measured under TLS."""

from __future__ import annotations

from pathlib import Path

import trustme


def make_certificates(folder: Path, *hosts: str) -> tuple[dict[str, Path], dict[str, Path]]:
    """Make an authority, and a certificate for loopback and these hosts.

    Returns the settings for TLS and the additional ones for mutual TLS.
    """
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", *{"127.0.0.1", *hosts})
    ca, cert, key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(str(ca))
    issued.cert_chain_pems[0].write_to_path(str(cert))
    issued.private_key_pem.write_to_path(str(key))
    return (
        {"tls_ca": ca, "tls_cert": cert, "tls_key": key},
        {"tls_client_ca": ca, "tls_client_cert": cert, "tls_client_key": key},
    )
