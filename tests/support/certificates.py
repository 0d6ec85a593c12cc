"""Certificates for tests: an authority, and files of what it signed, replaced as Kubernetes replaces a secret."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import grpc
import trustme

from service_chassis.tls import TlsFiles

_versions = count()


class Authority:
    """Who signs, and its own certificate as a file."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self.pem = self._ca.cert_pem.bytes()
        self.path = directory / "authority.crt"
        self.path.write_bytes(self.pem)

    def issue(self, *names: str, common_name: str | None = None, expired: bool = False) -> tuple[bytes, bytes]:
        """Return certificate and key for these names."""
        begin = datetime.now(UTC) - timedelta(days=10)
        made = self._ca.issue_cert(
            *names,
            common_name=common_name,
            not_before=begin if expired else None,
            not_after=begin + timedelta(days=1) if expired else None,
            key_type=trustme.KeyType.ECDSA,
        )
        return b"".join(pem.bytes() for pem in made.cert_chain_pems), made.private_key_pem.bytes()

    def channel_credentials(self, *names: str, expired: bool = False) -> grpc.ChannelCredentials:
        """Return what a client with a certificate for ``names`` connects with; without names it shows none."""
        if not names:
            return grpc.ssl_channel_credentials(self.pem)
        certificate, key = self.issue(*names, expired=expired)
        return grpc.ssl_channel_credentials(self.pem, key, certificate)


class Secret:
    """A directory as kubelet mounts a secret: names are links into ..data, which is swapped for another version."""

    def __init__(self, directory: Path, **files: bytes) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.replace(**files)
        for name in files:
            os.symlink(Path("..data") / name, directory / name)

    def replace(self, **files: bytes) -> None:
        """Swap all files at once."""
        version = self._directory / f"..{next(_versions)}"
        version.mkdir()
        for name, content in files.items():
            (version / name).write_bytes(content)
        link = self._directory / "..data_tmp"
        os.symlink(version.name, link)
        link.rename(self._directory / "..data")

    def path(self, name: str) -> str:
        return str(self._directory / name)


class Identity(Secret):
    """Certificate, key and authority of one process."""

    def __init__(self, directory: Path, authority: Authority, *names: str, trusted: Authority | None = None) -> None:
        self.authority = authority
        self.trusted = trusted or authority
        super().__init__(directory, **self._files(*names))

    def renew(self, *names: str, trusted: Authority | None = None) -> None:
        """Issue it anew, and perhaps trust another authority from now on."""
        self.trusted = trusted or self.trusted
        self.replace(**self._files(*names))

    def _files(self, *names: str) -> dict[str, bytes]:
        certificate, key = self.authority.issue(*names)
        return {"certificate": certificate, "key": key, "ca": self.trusted.pem}

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(certificate=self.path("certificate"), key=self.path("key"), ca=self.path("ca"))

    @property
    def one_sided(self) -> TlsFiles:
        """Of a server that asks nobody for a certificate."""
        return TlsFiles(certificate=self.path("certificate"), key=self.path("key"))
