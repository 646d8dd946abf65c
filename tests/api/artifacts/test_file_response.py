"""File name and content type of a downloaded file."""

import pytest

from api.artifacts.file_response import content_type, filename_parameter


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.txt", "text/plain"),
        ("config.yaml", "text/plain"),
        ("metrics.json", "text/plain"),
        ("MLmodel", "text/plain"),
        ("mlproject", "text/plain"),
        ("page.html", "text/html"),
        ("picture.png", "image/png"),
        ("paper.pdf", "application/pdf"),
        ("model.pkl", "application/octet-stream"),
        ("weights", "application/octet-stream"),
        ("a.MLmodel.bin", "application/octet-stream"),
    ],
)
def test_content_type_equals_mlflows_for_the_file_name(name: str, expected: str) -> None:
    assert content_type(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.txt", "filename=a.txt"),
        ("dog+step+20+timestamp+100.png", "filename=dog+step+20+timestamp+100.png"),
        ("dog%step%20%timestamp%100%a-1.png", "filename=dog%step%20%timestamp%100%a-1.png"),
        ("two words.txt", 'filename="two words.txt"'),
        ("a (1), b;c=d.txt", 'filename="a (1), b;c=d.txt"'),
        ("50%.txt", "filename*=UTF-8''50%25.txt"),
        ('a";b.txt', "filename*=UTF-8''a%22%3Bb.txt"),
        ("a\\b.txt", "filename*=UTF-8''a%5Cb.txt"),
        ("a\nb.txt", "filename*=UTF-8''a%0Ab.txt"),
        ("m\u00fcll.txt", "filename*=UTF-8''m%C3%BCll.txt"),
    ],
)
def test_filename_is_plain_where_possible_quoted_or_encoded_otherwise(name: str, expected: str) -> None:
    """As MLflow's server writes it: clients that read only `filename` know no other form."""
    assert filename_parameter(name) == expected
