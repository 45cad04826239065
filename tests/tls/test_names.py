"""Who a certificate names."""

from __future__ import annotations

from penstock.tls.names import CertificateNames


def test_the_subject_is_written_with_its_most_specific_part_first() -> None:
    subject = ((("organizationName", "Example, Inc"),), (("commonName", "first"),), (("commonName", "orders"),))

    names = CertificateNames.read({"subject": subject})

    assert names.subject == "CN=orders,CN=first,O=Example\\, Inc"
    assert names.common_name == "orders"


def test_alternative_names_are_separated_by_kind() -> None:
    alternative = (("DNS", "a.example"), ("email", "a@example.com"), ("URI", "spiffe://a"), ("DNS", "b.example"))

    names = CertificateNames.read({"subject": (), "subjectAltName": alternative})

    assert (names.subject, names.common_name) == ("", None)
    assert names.dns_names == ("a.example", "b.example")
    assert names.emails == ("a@example.com",)
    assert names.uris == ("spiffe://a",)


def test_blanks_and_number_signs_at_the_ends_of_a_name_are_escaped() -> None:
    names = [CertificateNames.read({"subject": ((("commonName", name),),)}).subject for name in ("#1 ", " ", " x")]

    assert names == ["CN=\\#1\\ ", "CN=\\ ", "CN=\\ x"]
